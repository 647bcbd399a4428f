"""The measurements of bench/speed.py."""
