"""bn_act_optim on the real Ultralytics."""


def test_models_train_as_stocks(program):
    assert program("bn_act.py")["as stock"]
