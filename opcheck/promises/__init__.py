"""The promises: each is a function that holds an operator to one of them."""
