"""Loops and chains that are rematerialized: scan, while_loop, sequential."""
