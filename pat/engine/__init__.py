"""The switch of tensor-parallel size inside running SGLang processes."""
