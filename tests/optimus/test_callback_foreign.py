"""OptimusCallback in projects that are not ours: nothing in them is changed for it."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    WeightAveraging,
)

from optimus.callback import OptimusCallback
from tests import processes
from tests.optimus.foreign_modules import (
    Gan,
    LogsInForward,
    Manual,
    Regressor,
    SubmodulesCalled,
    TakesObjects,
    loader,
    trainer,
)


def optimus(**given: Any) -> OptimusCallback:
    """Short phases, and the inner compiler that is quickest to call."""
    defaults: dict[str, Any] = {
        "baseline_steps": 8,
        "warmup_steps": 1,
        "window": 2,
        "inner": "eager",
    }
    return OptimusCallback(**(defaults | given))


@pytest.mark.parametrize(
    ("module_class", "targets"),
    [
        (Regressor, ["Regressor"]),
        (SubmodulesCalled, ["net", "head"]),
        (LogsInForward, ["net"]),
        (Manual, ["Manual"]),
        (Gan, ["generator", "discriminator"]),
        (TakesObjects, ["net.net"]),
    ],
)
def test_a_module_of_any_kind_trains_unchanged(
    tmp_path: Path, module_class: Any, targets: list[str]
) -> None:
    callback = optimus(inner="aot_eager")
    module = module_class()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    fit = trainer(tmp_path, callback)
    fit.fit(module, loader(18))
    found = callback.summary()
    assert found["targets"] == targets
    assert found["phases"]["baseline"]["graphs"] >= len(targets)
    assert found["phases"]["optimised"]["graphs"] >= len(targets)
    assert found["gain"]["qps"] is not None, found["gain"]["qps_note"]
    assert not [r for r in found["remarks"] if "failed" in r or "gave up" in r]
    assert before.keys() == module.state_dict().keys()
    changed = [k for k, v in module.state_dict().items() if not torch.equal(v, before[k])]
    assert any("weight" in key for key in changed)


@pytest.mark.parametrize(
    "given",
    [
        {"accumulate_grad_batches": 3},
        {"precision": "bf16-mixed"},
        {"gradient_clip_val": 0.1},
        {"barebones": True, "logger": None},
        {"deterministic": True},
        {"inference_mode": False, "num_sanity_val_steps": 1},
    ],
    ids=str,
)
def test_trainer_settings(tmp_path: Path, given: dict[str, Any]) -> None:
    callback = optimus(inner="aot_eager" if "precision" in given else "eager")
    if given.get("barebones"):
        fit = pl.Trainer(
            barebones=True,
            max_epochs=1,
            accelerator="cpu",
            default_root_dir=tmp_path,
            callbacks=[callback],
        )
    else:
        fit = trainer(tmp_path, callback, **given)
    fit.fit(Regressor(), loader(18), loader(2))
    found = callback.summary()
    assert found["gain"]["qps"] is not None, found["gain"]["qps_note"]
    assert found["remarks"] == []


def test_losses_equal_those_without_optimus_for_a_gan(tmp_path: Path) -> None:
    """Dropout-free, so the same random numbers must give the same training."""
    weights: list[torch.Tensor] = []
    for name, callbacks in (("plain", ()), ("optimus", (optimus(),))):
        torch.manual_seed(5)
        module = Gan()
        trainer(tmp_path / name, *callbacks).fit(module, loader(16))
        weights.append(torch.cat([p.flatten() for p in module.parameters()]))
    assert torch.allclose(weights[0], weights[1], rtol=1e-4, atol=1e-6)


def test_other_callbacks_work_beside_it(tmp_path: Path) -> None:
    class Seen(pl.Callback):
        ends = 0

        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            self.ends += 1

    class Scheduled(Regressor):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    seen, callback = Seen(), optimus()
    averaging = WeightAveraging()
    fit = trainer(
        tmp_path,
        seen,
        LearningRateMonitor("step"),
        averaging,
        EarlyStopping("val_loss", patience=50),
        ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=5, save_top_k=-1),
        callback,
        enable_checkpointing=True,
        max_epochs=2,
    )
    fit.fit(Scheduled(), loader(12), loader(2))
    found = callback.summary()
    assert seen.ends == 24
    assert found["steps"] == 24
    assert found["phases"]["optimised"]["graphs"] == 2, "a schedule of the learning rate adds none"
    assert found["remarks"] == []
    averaged = averaging._average_model
    assert averaged is not None
    assert not [m for m in averaged.modules() if "_compiled_call_impl" in m.__dict__]


def test_a_module_that_the_user_compiled_as_a_whole_is_left_to_him(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Silent(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.nn.functional.mse_loss(self(batch[0]), batch[1])

    callback = optimus()
    trainer(tmp_path, callback).fit(torch.compile(Silent(), backend="eager"), loader(12))  # type: ignore[arg-type]
    assert callback.summary()["targets"] == []
    assert "pass it uncompiled" in capsys.readouterr().out


def test_a_checkpoint_loads_without_optimus(tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=12)
    fit = trainer(tmp_path, optimus(), saved, enable_checkpointing=True)
    fit.fit(Regressor(), loader(12))
    program = """
        import sys, warnings
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "optimus":
                    raise ImportError("Optimus is not installed here")
        sys.meta_path.insert(0, Absent())
        import torch
        import lightning.pytorch as pl
        from tests.optimus.foreign_modules import Regressor, loader, trainer
        from pathlib import Path
        path = Path(sys.argv[1])
        torch.load(path / "last.ckpt", weights_only=True)
        module = Regressor.load_from_checkpoint(path / "last.ckpt")
        assert module.lr == 0.05
        fit = trainer(path / "plain", max_epochs=2)
        fit.fit(module, loader(12), ckpt_path=path / "last.ckpt")
        assert fit.global_step == 24, fit.global_step
        assert not [name for name in sys.modules if name.split(".")[0] == "optimus"]
    """
    done = processes.run([sys.executable, "-c", textwrap.dedent(program), tmp_path], forked=True)
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_made_without_optimus_goes_on_with_it(tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=6)
    trainer(tmp_path, saved, enable_checkpointing=True).fit(Regressor(), loader(6))
    callback = optimus()
    fit = trainer(tmp_path, callback, max_epochs=4)
    fit.fit(Regressor(), loader(6), ckpt_path=tmp_path / "last.ckpt")
    assert fit.global_step == 24
    assert callback.summary()["steps"] == 18, "the baseline begins where Optimus came in"
    assert callback.summary()["gain"]["qps"] is not None


def test_the_older_package_of_lightning_takes_the_same_callback(tmp_path: Path) -> None:
    """Run apart: which of the two packages is imported first decides a lot."""
    program = """
        import sys
        from optimus.callback import OptimusCallback
        import pytorch_lightning as old, torch
        from torch.utils.data import DataLoader, TensorDataset
        class Module(old.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
            def training_step(self, batch, batch_idx):
                loss = self.net(batch[0]).square().mean()
                self.log("loss", loss)
                return loss
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), 0.1)
        callback = OptimusCallback(baseline_steps=8, warmup_steps=1, window=2, inner="eager")
        fit = old.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], logger=False,
                          default_root_dir=sys.argv[1], enable_checkpointing=False)
        fit.fit(Module(), DataLoader(TensorDataset(torch.randn(72, 4)), batch_size=4))
        assert callback.summary()["gain"]["qps"] is not None
        assert isinstance(callback, OptimusCallback)
        import pickle
        assert pickle.loads(pickle.dumps(callback)).settings == callback.settings
    """
    done = processes.run([sys.executable, "-c", textwrap.dedent(program), tmp_path], forked=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "optimus_summary.html").exists()


def test_a_torchrec_model_is_compiled_where_it_takes_tensors(tmp_path: Path) -> None:
    """A DLRM called with a KeyedJaggedTensor, which breaks the graph: its dense parts remain."""
    dlrm = pytest.importorskip("torchrec.models.dlrm")
    modules = pytest.importorskip("torchrec.modules.embedding_modules")
    configs = pytest.importorskip("torchrec.modules.embedding_configs")
    sparse = pytest.importorskip("torchrec.sparse.jagged_tensor")

    class Recommender(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            tables = [
                configs.EmbeddingBagConfig(
                    name=name, embedding_dim=8, num_embeddings=20, feature_names=[name]
                )
                for name in ("user", "item")
            ]
            bags = modules.EmbeddingBagCollection(tables=tables)
            self.model = dlrm.DLRM(bags, 4, [8, 8], [8, 1])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            dense, ids, labels = batch
            logits = self.model(dense, kjt(ids))
            return torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 0], labels)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    def kjt(ids: torch.Tensor) -> Any:
        lengths = torch.ones(ids.numel(), dtype=torch.int64)
        return sparse.KeyedJaggedTensor(["user", "item"], ids.t().flatten(), lengths=lengths)

    rows = 4 * 18
    data = torch.utils.data.TensorDataset(
        torch.randn(rows, 4), torch.randint(0, 20, (rows, 2)), torch.rand(rows)
    )
    callback = optimus()
    fit = trainer(tmp_path, callback)
    fit.fit(Recommender(), torch.utils.data.DataLoader(data, batch_size=4))
    found = callback.summary()
    assert found["targets"] == ["model.dense_arch", "model.over_arch"]
    assert found["gain"]["qps"] is not None, found["gain"]["qps_note"]
    assert found["remarks"] == []


@pytest.mark.gpu
def test_a_run_on_a_gpu(tmp_path: Path) -> None:
    callback = optimus(baseline_steps=12, warmup_steps=3)
    fit = trainer(tmp_path, callback, accelerator="gpu")
    fit.fit(Regressor(), loader(40))
    found = callback.summary()
    baseline, optimised = found["phases"]["baseline"], found["phases"]["optimised"]
    assert baseline["peak_memory"].keys() == {"allocated", "reserved"}
    assert baseline["kernels_per_step"] > optimised["kernels_per_step"] > 0
    assert found["gain"]["qps"] is not None, found["gain"]["qps_note"]
    assert found["gain"]["peak_memory"] is not None, found["gain"]["memory_note"]
    assert found["remarks"] == []
