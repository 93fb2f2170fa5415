"""3 WHAT WE OBSERVE: what was counted, what is estimated, what is forecast."""
