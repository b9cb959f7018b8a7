from warpi.methods.registry import CORE as CORE, METHODS as METHODS, make_method as make_method
