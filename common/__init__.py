"""What every room uses: errors, configuration, the machine, files."""
