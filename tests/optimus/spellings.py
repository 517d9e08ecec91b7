"""The many ways in which PyTorch lets one say things: `{0}` and `{1}` are tensors."""

from __future__ import annotations


def forms(text: str) -> tuple[str, ...]:
    """Spellings, with a semicolon between each and the next."""
    return tuple(" ".join(form.split()) for form in text.split(";"))


POINTWISE = forms("""
    torch.relu({0}); {0} + 1; torch.tanh({0}); F.relu({0}); {0}.relu(); {0}.tanh();
    torch.sigmoid({0}); {0}.sigmoid(); F.silu({0}); F.gelu({0}); F.elu({0});
    F.gelu({0}, approximate='tanh'); F.leaky_relu({0}, 0.1); F.leaky_relu({0}); F.relu6({0});
    F.hardtanh({0}); F.softplus({0}); F.softplus({0}, beta=2); F.mish({0}); F.selu({0}); 1 + {0};
    {0} * 2; 2 * {0}; {0}.mul(0.5); torch.mul({0}, 0.5); {0} - 1; 1 - {0}; torch.rsub({0}, 1);
    torch.sub({0}, 1, alpha=2); {0} / 2; torch.div({0}, 2); -{0}; torch.neg({0}); {0} ** 2;
    torch.square({0}); {0}.abs(); torch.abs({0}); {0}.sin(); torch.clamp({0}, -1, 1);
    {0}.clamp(min=0); torch.clip({0}, max=0.5); {0}.clamp_min(0.1); torch.nan_to_num({0});
    torch.nan_to_num({0}, nan=1.0); torch.exp({0}.clamp(max=2)); torch.log1p({0}.abs());
    ({0} * {0} + 1).rsqrt(); torch.where({0} > 0, {0}, 0.0); {0}.masked_fill({0} < 0, 0.5);
    torch.maximum({0}, -{0}); {0}.square().add(1).sqrt(); F.dropout({0}, 0.5, self.training);
    F.dropout({0}, 0.3, True); F.dropout({0}, 0.5, False); F.dropout({0}, 0.0); {0}.clone();
    {0}.contiguous(); {0}.detach(); F.threshold({0}, 0.1, -1); torch.lerp({0}, {0} * 2, 0.3);
    torch.addcmul({0}, {0}, {0}, value=0.5); {0}.to(torch.float32); {0}.to(torch.float64);
    {0}.to(torch.bfloat16); {0}.type_as({0}); torch.erf({0}); torch.rand_like({0}) + {0};
    torch.zeros_like({0}) + {0}; {0} * torch.ones(()); {0} + {0}.shape[0]; {0}.relu().relu();
    torch.add({0}, {0}, alpha=0.5);
    torch.where({0} > 0, 1.0, {0}); torch.where({0} < 0, 0.5, -2); {0}.float(); {0}.double();
    torch.where({0} > 0, {0}, torch.tensor(2.0)); {0}.bfloat16(); {0}.to({0}.dtype);
    {0}.to('cpu', torch.float64).type_as({0}); {0}.to(torch.float64, copy=True); F.hardswish({0});
    F.logsigmoid({0}); F.celu({0}, 0.5); F.softsign({0}); torch.clamp({0}, torch.tensor(0.1));
    torch.no_grad()(torch.relu)({0}); {0}.where({0} > 0, torch.zeros_like({0}));
    torch.addcdiv({0}, {0}, {0}.square() + 1, value=2); {0}.new_ones({0}.shape) - {0}
""")
ROWS = forms("""
    F.softmax({0}, dim=-1); torch.softmax({0}, -1); {0}.softmax(dim=-1); F.log_softmax({0}, -1);
    F.softmax({0}, dim=1); F.layer_norm({0}, {0}.shape[-1:]); F.layer_norm({0}, ({1},), eps=0.1);
    F.rms_norm({0}, ({1},)); F.normalize({0}, dim=-1); F.normalize({0}, p=1.0); {0}.sum(-1);
    {0}.mean(-1, keepdim=True); torch.sum({0}, 1); {0}.sum(); {0}.mean(0); {0}.amax(-1);
    torch.mean({0}, dim=(0, 1)); {0}.cumsum(-1); {0}.std(-1, unbiased=False); {0}.argmax(-1);
    {0}.max(-1).values; {0} - {0}.mean(-1, keepdim=True); {0}.norm(dim=-1); {0}.sort(-1)[0];
    torch.sum({0}, -1, dtype=torch.float64); torch.softmax({0}, -1, dtype=torch.float64);
    {0}.logsumexp(-1); {0}.flip(-1); {0}.roll(1, -1); {0}.topk(1)[0];
    F.softmax({0}, 0); F.log_softmax({0}, dim=0); {0}.log_softmax(1); {0}.softmax(-2);
    torch.log_softmax({0}, -2, dtype=torch.float64); F.softmin({0}, 1); {0}.cumsum(0);
    torch.cumsum({0}, dim=1); {0}.cumprod(-1); {0}.cumsum(-1, dtype=torch.float64); {0}.prod(-1);
    {0}.amin(0, keepdim=True); {0}.var(-1, keepdim=True, unbiased=False); {0}.min(-1)[0];
    {0}.softmax(1).sum(1); {0}.sum((0, -1)); torch.logcumsumexp({0}, -1); {0}.cummax(-1)[0];
    {0} / {0}.sum(-1, keepdim=True).abs().clamp(min=1); F.layer_norm({0}, {0}.shape[1:]);
    torch.var_mean({0}, -1)[1]; F.group_norm({0}, 1); {0}.logsumexp((0, 1)); {0}.max()
""")
SHAPES = forms("""
    {0}.unsqueeze(1); {0}.unsqueeze(-1); torch.unsqueeze({0}, 0); {0}.squeeze(1); {0}.squeeze();
    torch.squeeze({0}, -1); {0}.flatten(1); {0}.flatten(); torch.flatten({0}, 0, 1);
    {0}.transpose(0, 1); torch.transpose({0}, -1, -2); {0}.t(); {0}.mT; {0}.T; {0}.permute(1, 0);
    torch.permute({0}, (1, 0, 2)); {0}.permute(0, 2, 1); {0}.movedim(0, -1); {0}.reshape(-1);
    {0}.view({0}.shape[0], -1); {0}.reshape({0}.shape[0], -1, 2); {0}.view(-1, 2);
    {0}.view({0}.shape); {0}.reshape({0}.size(0), 2, -1); {0}.unflatten(-1, (2, -1));
    {0}.unflatten(-1, (-1, 2)); {0}.expand(2, *{0}.shape); {0}.unsqueeze(0).expand(3, -1, -1);
    {0}.swapaxes(0, 1); {0}.view_as({0}); {0}.expand_as({0}); {0}.repeat(2, 1);
    {0}.narrow(-1, 0, 1); {0}[:, ::2]; {0}[:, [0, 0]]; {0}[None]; {0}[..., -1]; {0}[:, 0:0];
    {0}[0]; {0}[-1:]; {0}.as_strided((2,), (1,)); torch.as_strided({0}, (2,), (1,), 1);
    memory_order({0}); {0}.flatten().view(-1); {0}.diagonal(); {0}.unbind(-1)[0];
    {0}.select(-1, 0);
    {0}.expand(-1, -1); {0}.unsqueeze(1).expand(-1, 2, -1); {0}.broadcast_to(2, *{0}.shape);
    {0}[:, None].expand(-1, 3, *{0}.shape[1:]); torch.permute({0}, (-1, 0)); {0}.permute(2, 0, 1);
    {0}.transpose(1, 2).contiguous(); {0}.mT.reshape(-1); {0}.repeat_interleave(2, -1);
    {0}.tile(1, 2); {0}.unfold(-1, 2, 1); {0}[..., ::2]; {0}[..., 1::2]; {0}[1:, :-1]; {0}.ravel();
    {0}.swapdims(0, -1); {0}.chunk(3, -1)[0]; {0}.split(3, -1)[-1]; {0}.tril(); {0}.flatten(0, -1);
    {0}.mT.flatten(); {0}.index_select(-1, torch.tensor([0, 0])); {0}[torch.arange({0}.shape[0])];
    F.pad({0}, (0, 1)); F.pad({0}, (1, 0), value=0.5); {0}.squeeze((0, 1)); {0}.chunk(5, -1)[-1];
    {0}.gather(-1, torch.zeros_like({0}, dtype=torch.int64)); {0}.view(torch.int32).view({0}.dtype);
    {0}.take_along_dim({0}.argsort(-1), -1); torch.einsum('ij->ji', {0});
    torch.einsum('...i->...', {0}); {0}.as_strided({0}.shape, {0}.stride())
""")
PAIRS = forms("""
    {0} + {1}; {0} * {1}; torch.add({0}, {1}); {0}.add({1}, alpha=2); {0} - {1}; {0}.mul({1});
    torch.maximum({0}, {1}); torch.minimum({0}, {1}); torch.where({0} > {1}, {0}, {1});
    {0} / ({1}.abs() + 1); torch.lerp({0}, {1}, 0.5); torch.cat([{0}, {1}], -1); {0} @ {1}.t();
    torch.stack([{0}, {1}]); {0} @ {1}; torch.bmm({0}, {1}.mT); torch.matmul({0}, {1});
    torch.cat([{0}.detach(), {1}]); torch.cat([torch.zeros(0), {0}, {1}], 1); {0} > {1};
    torch.einsum('bi,bj->bij', {0}, {1}); F.linear({0}, {1}); torch.sub({0}, {1});
    {0}.pow(2) + {1};
    torch.where({1} > 0, {0}, 0.0); torch.where({0} > 0, 1.0, {1}); {0}.type_as({1});
    {0}.to({1}.dtype); {0}.to({1}); {0}.expand_as({1}); {0}.reshape({1}.shape); {0}.view_as({1});
    torch.einsum('bi,bi->b', {0}, {1}); torch.einsum('bi,ki->bk', {0}, {1}); torch.hypot({0}, {1});
    torch.einsum('...i,...i->...', {0}, {1}); torch.einsum('bij,bkj->bik', {0}, {1});
    torch.einsum('bij,bij->bj', {0}, {1}); torch.einsum('bi,bi->bi', {0}, {1});
    torch.addmm({0}[:, :1], {0}, {1}.t(), beta=0.5, alpha=2); torch.addmm({0}[0, 0], {0}, {1}.t());
    torch.baddbmm({0}, {0} @ {1}.mT, {1}, beta=0.5, alpha=2); F.cosine_similarity({0}, {1});
    torch.baddbmm({0}[..., :1], {0}, {1}.mT, beta=0, alpha=0.5); torch.addcmul({0}, {1}, {1});
    torch.addbmm({0}[0, :, :1], {0}, {1}.mT, beta=2); F.mse_loss({0}, {1}); {0}.logaddexp({1});
    torch.index_add({0}, 0, torch.tensor([0]), {1}[:1], alpha=2); {0}.masked_fill({1} > 0, 0.5);
    {0}.index_put((torch.tensor([0, 0]),), {1}[:1], accumulate=True); torch.dist({0}, {1});
    {0}.scatter(-1, torch.arange({0}.shape[-1]).flip(0).expand_as({0}), {1}); {0}.atan2({1});
    {0}.scatter_add(-1, torch.zeros_like({0}, dtype=torch.int64), {1}); torch.kron({0}, {1});
    {0}.index_copy(-1, torch.tensor([0]), {1}[..., :1]); {0}.masked_scatter({0} > 0, {1});
    {0}.select_scatter({1}.select(-1, 0), -1, 0); {0}.slice_scatter({1}[..., :1], -1, 0, 1);
    {0}.gather(-1, {1}.argsort(-1))
""")
IN_PLACE = forms("""
    {0}.add_(1); {0} += 1; {0}.mul_(0.5); {0}.relu_(); {0} *= 2; {0}[..., 0] = 1; {0}[0] = 0.5;
    {0}[{0} > 0] = 0; {0}.zero_(); {0}.copy_({1}); {0}.clamp_(min=0);
    {0}.masked_fill_({0} > 0, 0.5); F.relu({0}, inplace=True); F.dropout({0}, 0.5, True, True);
    {0} += {1}; {0}.add_({1}, alpha=2); {0}.fill_(1); {0}[:, 1:2] += 1; {0}[..., 0].mul_(2);
    {0}.detach().mul_(2); {0}.sigmoid_(); torch.add({0}, 1, out={0}); {0}.view(-1)[0] = 3;
    {0}.t().add_(1); {0} -= {1}; {0} /= 2; {0}.lerp_({1}, 0.5); F.elu({0}, inplace=True);
    torch.relu_({0}); add_one_({0}); {0}.data.add_(1);
    {0}.index_fill_(0, torch.tensor([0]), 2.0);
    {0}.narrow(-1, 0, 1).copy_({0}.narrow(-1, -1, 1));
    {0}.index_put_((torch.tensor([0]),), torch.tensor(2.0)); {0}[torch.tensor([0])] = {1}[:1];
    {0}.index_add_(-1, torch.tensor([0, 0]), {1}[..., :2]); {0}.index_copy_(0, torch.tensor([0]),
    {1}[:1]); {0}.scatter_(-1, torch.zeros_like({0}[..., :1], dtype=torch.int64), 2.0);
    {0}.scatter_add_(-1, torch.zeros_like({0}, dtype=torch.int64), {1}); {0}[:, [0]] += 1;
    {0}.mT.mul_(2); {0}[..., ::2].add_(1); {0}.unbind(-1)[0].zero_(); {0}[{1} > 0] = 1;
    {0}.chunk(2, -1)[0].add_(1); {0}.diagonal().add_(1); {0}.unsqueeze(0).mul_(2);
    {0}.select(-1, 0).copy_({1}.select(-1, -1)); {0}.view({0}.shape).add_(1);
    {0}[..., 0] = {1}[..., -1]; {0}.t().copy_({1}.t()); {0}.cumsum_(-1); {0}.addcmul_({1}, {1});
    torch.mul({0}, {1}, out={0}); torch.add({1}, 1, out={0}); torch.clamp({0}, 0, 1, out={0});
    torch.cat([{1}[:1], {1}[1:]], out={0}); torch.sum({1}, -1, out={0}.select(-1, 0));
    torch._foreach_add_([{0}, {1}], 1); torch._foreach_mul_([{0}], 2.0); {0}.uniform_();
    torch._foreach_copy_([{0}], [{1}]); {0}.bernoulli_(0.5); {0}.masked_scatter_({0} > 0, {1});
    {0}.clamp_(-1, 1); {0}.pow_(2); operator.iadd({0}, 1); {0}.sub_(1).relu_();
    F.hardtanh({0}, inplace=True); F.silu({0}, inplace=True); {0}.fill_diagonal_(1);
    {0}.view(torch.int32).zero_(); {0}.unsqueeze_(0); {0}.squeeze_(); {0}.t_(); {0}.detach_();
    {0}.transpose_(0, -1); {0}.as_strided((1,), (1,)).add_(1); {0}.expand(1, *{0}.shape).add_(1)
""")
WIDTHS = (4, 2, 6, 3, 1)
REGIONS = forms("""
    torch.no_grad(); torch.enable_grad(); torch.set_grad_enabled(False);
    torch.set_grad_enabled(True); torch.autocast('cpu', dtype=torch.bfloat16);
    torch.autocast('cpu', enabled=False);
    torch.autocast('cpu', dtype=torch.bfloat16, cache_enabled=False)
""")
PRODUCTS = forms("""
    {0} @ {1}; torch.matmul({0}, {1}); {0}.matmul({1}); torch.mm({0}, {1});
    torch.addmm({1}[0], {0}, {1}); F.linear({0}, {1}.t()); {0} @ {1} + {1}[0];
    torch.einsum('bi,ij->bj', {0}, {1}); torch.matmul({1}.t(), {0}.t()).t();
    torch.addmm({1}[0], {0}, {1}, beta=0.5, alpha=2); torch.addmm({1}[0], {0}, {1}, alpha=0.5);
    torch.addmm({1}[0], {0}, {1}, beta=0); torch.einsum('...i,ij->...j', {0}, {1});
    torch.tensordot({0}, {1}, 1); torch.mv({0}, {1}[:, 0]); torch.inner({0}, {1}.t());
    torch.baddbmm({1}[:1], {0}, {1}.expand({0}.shape[0], -1, -1), beta=0.5, alpha=2);
    F.linear({0}, {1}.mT, {1}[0]); ({1}.mT @ {0}.mT).mT; {0} @ {1} * 0.5; {0} @ {1}[:, 0];
    F.linear({0}, {1}.t()) + 1; torch.einsum('bki,ij->bkj', {0}, {1});
    torch.addmv({1}[0, :1], {0}, {1}[:, 0])
""")
JOINS = forms("""
    torch.cat([{0}], {1}); torch.stack([{0}], {1}); torch.stack(({0},), dim={1});
    torch.cat(({0},), dim={1}); torch.concat([{0}], dim={1}); torch.stack([{0}]);
    torch.stack([{0}], {1}).sum({1}); torch.hstack([{0}]); sum([{0}]); torch.vstack(({0},));
    torch.stack([{0}], 1).flatten(1); torch.stack([{0}], 0).mean(0); torch.concatenate([{0}]);
    torch.stack([{0}]).unbind(0)[-1]; torch.cat([{0}], {1}).split(2, {1})[0];
    torch.cat([t.unsqueeze(1) for t in [{0}]], 1); torch.cat([{0}, {0}], {1});
    torch.stack(torch._foreach_mul([{0}], 2.0), {1}); torch.column_stack([{0}]);
    torch.stack([{0}], {1}).softmax({1}); torch.cat([{0}], {1}).cumsum({1});
    torch.stack(torch.broadcast_tensors({0}), {1}); torch.cat([{0}], {1}).chunk(3, {1})[0];
    torch.stack([{0}], {1}).amax({1}); torch.stack([t.clone() for t in [{0}]], {1})
""")
UPDATES = forms("""
    self.{1}.add_({0}.detach().mean()); self.{1} += {0}.detach().sum();
    self.{1} = self.{1} * 0.9 + {0}.detach().mean();
    self.{1}.mul_(0.9).add_({0}.detach().mean(), alpha=0.1);
    self.{1}.copy_({0}.detach().sum()); torch.add(self.{1}, 1, out=self.{1});
    self.{1}.lerp_({0}.detach().amax().to(self.{1}.dtype), 0.5); self.{1}.data.mul_(2)
""")
LAYERS = forms("""
    nn.LayerNorm({}); nn.BatchNorm1d({}); nn.BatchNorm1d({}, affine=False);
    nn.LayerNorm({}, eps=0.01); nn.LayerNorm({}, elementwise_affine=False); nn.Dropout(0.4);
    nn.ReLU(inplace=True); nn.PReLU(); nn.RMSNorm({});
    nn.BatchNorm1d({}, momentum=None); nn.BatchNorm1d({}, track_running_stats=False);
    nn.BatchNorm1d({}, momentum=0.5, eps=0.1); nn.GroupNorm(1, {}); nn.Softmax(-1); nn.Identity();
    nn.Dropout(0.4, inplace=True); nn.LogSoftmax(0)
""")
INTO = forms("""
    torch.add({0}, {1}, out={2}); torch.sub({0}, {1}, alpha=2, out={2}); torch.exp({0}, out={2});
    torch.mul({0}, {1}, out={2}); torch.sigmoid({0}, out={2}); torch.clamp({0}, 0, 1, out={2});
    torch.cat([{0}[:1], {0}[1:]], out={2}); torch.cumsum({0}, -1, out={2});
    torch.where({0} > 0, {0}, {1}, out={2}); torch.lerp({0}, {1}, 0.5, out={2});
    torch.addcmul({0}, {1}, {1}, out={2}); torch.neg(input={0}, out={2});
    torch.sort({0}, -1, out=({2}, torch.empty({0}.shape, dtype=torch.int64)))[0];
    torch.stack([{0}[..., 0], {1}[..., 0]], -1, out={2}[..., :2]); torch.add({0}, {1}, out=({2}));
    torch.matmul({0}, torch.eye({0}.shape[-1]), out={2}); torch.sum({0}, -1, out={2}[..., 0]);
    torch.index_select({0}, 0, torch.arange({0}.shape[0]), out={2}); torch.tanh({0}, out={2})
""")
MEMORY = forms("""
    torch.zeros_like({0}); torch.zeros({0}.shape); torch.zeros(2, *{0}.shape)[0]; {0}; {1}; {2};
    torch.zeros_like({0}).mT.contiguous().mT; torch.ones_like({0}); torch.zeros(0)
""")
AT_ONCE = forms("""
    torch._foreach_add([{0}], 1.0); torch._foreach_mul([{0}], 2); torch._foreach_neg([{0}]);
    torch._foreach_add([{0}], [{0}], alpha=2); torch._foreach_clamp_min([{0}], 0);
    torch._foreach_sub(({0},), ({0},)); torch._foreach_addcmul([{0}], [{0}], [{0}], 0.5);
    torch._foreach_lerp([{0}], [{0}], 0.5); torch._foreach_norm([{0}]);
    torch._foreach_maximum([{0}], 0.1); torch._foreach_sigmoid([{0}]); torch._foreach_abs([{0}]);
    torch.broadcast_tensors({0}); torch._foreach_pow([{0}], 2)
""")
AT_ONCE_IN_PLACE = forms("""
    torch._foreach_add_([{0}], 1.0); torch._foreach_mul_([{0}], 0.5); torch._foreach_zero_([{0}]);
    torch._foreach_copy_([{0}], [{0}][::-1]); torch._foreach_lerp_([{0}], [{0}][::-1], 0.5);
    torch._foreach_addcdiv_([{0}], [{0}], [{0}], 2); torch._foreach_sub_([{0}], [{0}])
""")
NUMBERED = forms("""
    {0} * {1}; {0} + {1}; {1} - {0}; {0}[..., :{1}]; {0}.narrow(-1, 0, {1}); {0}[..., {1}:];
    torch.split({0}, {1}, -1)[0]; {0}.chunk({1}, -1)[0]; F.leaky_relu({0}, {1}); {0}.roll({1}, -1);
    torch.clamp({0}, max={1}); torch.where({0} > {1}, {0}, {1}); torch.full({0}.shape, {1}) + {0};
    {0}.expand({1}, *{0}.shape); {0} if {1} else -{0}; torch.add({0}, {0}, alpha={1}); {0}.pow({1});
    F.dropout({0}, {1} / 4, self.training); torch.full_like({0}, {1}) * {0}; {0} / ({1} + 1);
    {0}.masked_fill({0} > 0, {1}); torch.lerp({0}, -{0}, {1}); {0}.repeat(1, {1}); {0} * ({1} * 2);
    {0}.reshape({0}.shape[0], -1, {1}); {0}[..., {1}]; F.elu({0}, {1}); {0}.select(-1, {1});
    F.softplus({0}, {1} + 1); F.layer_norm({0}, {0}.shape[-1:], eps={1} + 0.1); {0}[:{1}];
    {0}.unsqueeze(-1).expand(*{0}.shape, {1}); {0}.mul_({1}); {0}.fill_({1}); {0} > {1};
    torch.addmm({0}[0, 0], {0}, {0}.t(), alpha={1}); F.softmax({0}, -1) * {1}; {0}.softmax({1} - 1);
    torch.stack([{0}] * {1}); torch.cat([{0}] * {1}, -1); {0}.view(-1, {1});
    {0} + {0}.shape[0] * {1}
""")
LOOKUPS = forms("""
    F.embedding({0}, {1}); F.embedding({0}, {1}, padding_idx=0); {1}[{0}];
    F.embedding({0}, {1}, max_norm=1.0); F.embedding_bag({0}, {1}, mode='sum');
    F.embedding_bag({0}, {1});
    F.embedding_bag({0}, {1}, mode='max'); F.embedding_bag({0}, {1}, torch.tensor([0, 1]));
    F.embedding_bag({0}, {1}, mode='sum', per_sample_weights=torch.full({0}.shape, 0.5));
    F.embedding({0}, {1}, scale_grad_by_freq=True); F.embedding_bag({0}, {1}, padding_idx=1);
    {1}.index_select(0, {0}.flatten()); F.one_hot({0}, 8).to({1}.dtype) @ {1};
    torch.gather({1}[:, 0], 0, {0}.flatten()); torch.take({1}, {0})
""")
PARTS = forms("""
    torch.split({0}, {1}, -1); {0}.chunk({2}, -1); {0}.unflatten(-1, ({2}, -1)).unbind(-2);
    [{0}[..., i * {1} : i * {1} + {1}] for i in range({2})];
    torch.tensor_split({0}, {2}, -1); [{0}.narrow(-1, i * {1}, {1}) for i in range({2})];
    {0}.reshape({0}.shape[0], {2}, -1).unbind(1); [{0}[:, i] for i in range({0}.shape[1])];
    [{0}[..., i * {1} :][..., :{1}] for i in reversed(range({2}))]; {0}.split([{1}] * {2}, dim=-1)
""")
EXPERTS = forms("""
    nn.Sequential(nn.Linear({0}, {1}), nn.ReLU(), nn.Linear({1}, {2})); nn.Linear({0}, {2});
    nn.Sequential(nn.Linear({0}, {2}), nn.LayerNorm({2}), nn.ReLU());
    nn.Sequential(nn.Linear({0}, {2}), nn.BatchNorm1d({2}), nn.ReLU(inplace=True));
    nn.Sequential(nn.LayerNorm({0}), nn.Linear({0}, {2}), nn.Dropout(0.3), nn.GELU())
""")
MIXTURES = forms("""
    ({0}.unsqueeze(-1) * {1}).sum(1); torch.bmm({0}.unsqueeze(1), {1}).squeeze(1);
    torch.einsum('be,bed->bd', {0}, {1}); ({0}[:, None] @ {1})[:, 0];
    torch.matmul({1}.transpose(1, 2), {0}.unsqueeze(2)).squeeze(-1);
    torch.sum({1} * {0}[..., None], dim=1); ({0}[:, :, None] * {1}).sum(-2)
""")
TRIANGLES = forms("""
    torch.triu_indices({0}, {0}, 1); torch.tril_indices({0}, {0}, -1); torch.tril_indices({0}, {0})
""")
UNITS = forms("""
    torch.relu({2}({0})); {1} * {3}({2}({0})) + {0}; {0} + {3}(F.gelu({2}({0})));
    {3}(torch.relu({2}({0}))); {0} * torch.sigmoid({3}(torch.relu({2}({0}))));
    {3}(F.silu({2}({0})) * {2}({0})); F.layer_norm({0} + {3}({2}({0})), {0}.shape[-1:]);
    {3}({2}({0}).tanh()).relu(); {1} * {3}({2}({0})) + {0} + {1}; {0} * {3}({2}({1}));
    {3}({2}({0})) + {2}.bias[:1]; F.softmax({3}({2}({0})), -1) * {0}
""")
SEQUENTIAL = forms("""
    nn.Sequential(nn.Linear({0}, {1}), nn.ReLU()); nn.LayerNorm({0}); nn.Linear({0}, {1});
    nn.Sequential(nn.LayerNorm({0}), nn.Linear({0}, {1}, bias=False), nn.Tanh());
    nn.Sequential(nn.Linear({0}, {1}), nn.LayerNorm({1}), nn.ReLU(inplace=True), nn.Dropout(0.3));
    nn.Sequential(nn.Linear({0}, {1}), nn.BatchNorm1d({1}), nn.Sigmoid(), nn.Linear({1}, {0}));
    nn.Sequential(nn.RMSNorm({0}), nn.Linear({0}, {1}), nn.SiLU())
""")
EMPTY = forms("""
    torch.zeros({1}); {0}.new_zeros(({1})); torch.ones({1}, dtype=torch.float64);
    torch.zeros({1}, dtype={0}.dtype)
""")
FILLS = (
    *(
        (True, form)
        for form in forms("""
        {0}[..., {3}:{4}] = {2}; {0}[:, {3}:{4}] = {2}; {0}[..., {3}:{4}] += {2};
        {0}[..., {3}:{4}].copy_({2}); {0}.narrow(-1, {3}, {4} - {3}).add_({2})
    """)
    ),
    *(
        (False, form)
        for form in forms("""
        {0}[{1}] = {2}; {0}[{1}] += {2}; {0}[{1}].copy_({2}); {0}.select(0, {1}).add_({2});
        torch.mul({2}, 2, out={0}[{1}]); {0}[{1}, :] = {2}
    """)
    ),
)
DROPS = forms("""
    F.dropout({0}, 0.5, self.training); F.dropout({0}, 0.3); F.dropout({0}, 0.0);
    F.alpha_dropout({0}, 0.3, self.training); F.dropout({0}, 0.5, False);
    torch.dropout({0}, 0.2, self.training); F.dropout(F.relu({0}), 0.5, self.training, inplace=True)
""")
ATTENTIONS = forms("""
    F.scaled_dot_product_attention({0}, {1}, {2}); ({0} @ {1}.mT * 0.5).softmax(-1) @ {2};
    torch.bmm(F.softmax(torch.bmm({0}, {1}.transpose(1, 2)) / 2, -1), {2});
    torch.einsum('bqk,bkd->bqd', torch.einsum('bqd,bkd->bqk', {0}, {1}).softmax(-1), {2})
""")
TURNED = forms("""
    {0}.view(-1, 2, 2, {1}).transpose(1, 2); {0}.reshape(-1, 2, 2, {1}).permute(0, 2, 1, 3);
    torch.stack({0}.view(-1, 2, 2, {1}).unbind(1), 2); {0}.unflatten(1, (2, 2, {1})).swapaxes(1, 2)
""")
