"""What all other packages use: errors, configuration, the machine, files."""
