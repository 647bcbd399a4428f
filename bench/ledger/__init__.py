"""Claims from papers and guides, what measures each of them, and the verdicts."""
