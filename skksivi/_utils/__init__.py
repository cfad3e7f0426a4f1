"""What every layer uses: arrays, checks and warnings, lazy imports, files, statistics of draws."""
