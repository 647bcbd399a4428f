"""The inside of bench/ablate.py: designs, runs, costs, verdicts, report, plots."""
