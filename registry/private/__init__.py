"""Every private name of torch and triton that llmk uses, looked up once, with what is public behind it.

A release may rename any of them: llmk is then slower, but imports and gives the same numbers. Where nothing public
does the same, what needs the name raises when it is called and says so. `names` looks them up, and each of the other
modules has those of one thing.
"""
