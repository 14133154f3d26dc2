"""The exception for mistakes of users, which commands print as one sentence."""


class Refusal(ValueError):
    """A mistake of the user in one sentence: the rule, the value received and the way out.

    Any other exception is a fault of this package. Commands show its traceback.
    """

    # Keras re-raises an exception with this attribute unchanged. It would rewrite any other ValueError of a layer's
    # `call` into a paragraph that lists the arguments of the layer.
    _keras_call_info_injected = True
