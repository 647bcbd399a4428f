"""The inside of bench/: arms, runs, costs, verdicts, the report of a sweep, the page."""
