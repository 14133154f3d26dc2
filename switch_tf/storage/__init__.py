"""Files, buckets, locks and standard output."""
