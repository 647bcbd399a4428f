"""The inside of bench/speed.py and bench/faults.py."""
