"""Files wherever they lie: names, errors, owners."""
