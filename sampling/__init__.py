"""The parts of sampling outside sample.py."""
