"""The inside of bench/faults.py: runs seen from outside, and how they are killed."""
