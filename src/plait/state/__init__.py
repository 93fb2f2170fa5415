"""7 WHERE ROWS REST: segments, tiers, manifests."""
