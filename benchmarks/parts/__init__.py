"""Parts of benchmarks: engines that cost nothing, floors, and how figures are shown."""
