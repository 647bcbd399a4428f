"""The inside of bench/speed.py."""
