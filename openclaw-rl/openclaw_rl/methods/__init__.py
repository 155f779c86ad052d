"""Methods: each turns a judged turn into a sample, credit per token and a loss. Entry points find them."""
