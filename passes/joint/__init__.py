"""The joint graph of a stage: trace forward and backward together, then rewrite them with the same bits."""
