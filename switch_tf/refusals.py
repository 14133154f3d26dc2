"""The exception for mistakes of users, which commands print as one sentence."""


class Refusal(ValueError):
    """A mistake of the user in one sentence: the rule, the value received and the way out.

    Any other exception is a fault of this package. Commands show its traceback.
    """

    # Keras and AutoGraph re-raise an exception with these attributes unchanged. They would rewrite any other error of a
    # layer or of a traced function into a paragraph about its call.
    _keras_call_info_injected = True
    ag_pass_through = True
