"""Who asks: API keys, signed tokens and tenants' terms, as etcd said last. Nothing else in a request is believed."""
