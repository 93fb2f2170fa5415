"""Many queries in one engine: paper 004's generator, counted work and overall data throughput."""
