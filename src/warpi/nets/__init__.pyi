from warpi.nets.registry import NETS as NETS, make_net as make_net
