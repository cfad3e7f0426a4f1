"""What every layer uses: arrays, numbers, warnings, lazy imports, files, control variates and Pareto smoothing."""
