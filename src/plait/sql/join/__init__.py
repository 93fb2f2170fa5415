"""From a plan to join graphs: Two-Step Convert, keys, windows, conditions."""
