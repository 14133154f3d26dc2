"""A run for people: metrics.jsonl, TensorBoard, progress lines and report.html."""
