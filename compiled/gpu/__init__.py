"""What only an accelerator needs: a runner with a step in flight, graphs, inputs in one copy, its own sampler."""
