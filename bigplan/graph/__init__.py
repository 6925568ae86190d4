"""What must be computed: legal strategies, and the operators and tensors of one step."""
