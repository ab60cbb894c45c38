"""Whether a rematerialized function is what it was and does what it is meant to: `check` and `lint`."""
