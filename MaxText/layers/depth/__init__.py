"""Dense depth connections: aggregation over the outputs of earlier layers."""
