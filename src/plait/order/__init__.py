"""4 ONE QUERY: in which order an input probes the others."""
