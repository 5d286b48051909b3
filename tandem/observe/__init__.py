"""What a person sees of a run: metrics.jsonl, trackers, the progress line, timelines and the closing report."""
