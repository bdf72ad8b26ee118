"""A hand-written kernel of logsumexp."""
