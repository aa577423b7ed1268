"""Admission: one small function per check and one table of them."""
