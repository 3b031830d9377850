"""The HTTP routes of model servers, over whatever samples the tokens: vLLM's, OpenAI's, SGLang's and Atropos'.

A `ModelRoute` reads the body of a request into a `SamplingRequest`, and writes completions as that server does. A
`ModelHost` has the tokenizer and what the model can report. The fake server and the policy server are two hosts.
"""
