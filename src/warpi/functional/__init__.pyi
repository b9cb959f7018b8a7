from warpi.functional.losses import cross_entropy as cross_entropy
