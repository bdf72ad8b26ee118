"""Loops: scans whose body is elementwise over lanes."""
