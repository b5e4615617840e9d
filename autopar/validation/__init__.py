"""Published training runs as predictions: what was measured against what autopar would say."""
