"""The code behind bench/faults.py: start, kill and inspect runs from outside."""
