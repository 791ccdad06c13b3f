"""Task metrics: functions of (answer, reference) to a score between 0 and 1; `scoring.py` chooses one by `dataset.metric`."""
