"""The many ways in which PyTorch lets one say things: `{0}` and `{1}` are tensors."""

from __future__ import annotations


def forms(text: str) -> tuple[str, ...]:
    """Spellings, with a semicolon between each and the next."""
    return tuple(form.strip() for form in text.split(";"))


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
    torch.add({0}, {0}, alpha=0.5)
""")
ROWS = forms("""
    F.softmax({0}, dim=-1); torch.softmax({0}, -1); {0}.softmax(dim=-1); F.log_softmax({0}, -1);
    F.softmax({0}, dim=1); F.layer_norm({0}, {0}.shape[-1:]); F.layer_norm({0}, ({1},), eps=0.1);
    F.rms_norm({0}, ({1},)); F.normalize({0}, dim=-1); F.normalize({0}, p=1.0); {0}.sum(-1);
    {0}.mean(-1, keepdim=True); torch.sum({0}, 1); {0}.sum(); {0}.mean(0); {0}.amax(-1);
    torch.mean({0}, dim=(0, 1)); {0}.cumsum(-1); {0}.std(-1, unbiased=False); {0}.argmax(-1);
    {0}.max(-1).values; {0} - {0}.mean(-1, keepdim=True); {0}.norm(dim=-1); {0}.sort(-1)[0];
    torch.sum({0}, -1, dtype=torch.float64); torch.softmax({0}, -1, dtype=torch.float64);
    {0}.logsumexp(-1); {0}.flip(-1); {0}.roll(1, -1); {0}.topk(1)[0]
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
    {0}.select(-1, 0)
""")
PAIRS = forms("""
    {0} + {1}; {0} * {1}; torch.add({0}, {1}); {0}.add({1}, alpha=2); {0} - {1}; {0}.mul({1});
    torch.maximum({0}, {1}); torch.minimum({0}, {1}); torch.where({0} > {1}, {0}, {1});
    {0} / ({1}.abs() + 1); torch.lerp({0}, {1}, 0.5); torch.cat([{0}, {1}], -1); {0} @ {1}.t();
    torch.stack([{0}, {1}]); {0} @ {1}; torch.bmm({0}, {1}.mT); torch.matmul({0}, {1});
    torch.cat([{0}.detach(), {1}]); torch.cat([torch.zeros(0), {0}, {1}], 1); {0} > {1};
    torch.einsum('bi,bj->bij', {0}, {1}); F.linear({0}, {1}); torch.sub({0}, {1});
    {0}.pow(2) + {1}
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
    {0}.narrow(-1, 0, 1).copy_({0}.narrow(-1, -1, 1))
""")
WIDTHS = (4, 2, 6, 3, 1)
REGIONS = forms("""
    torch.no_grad(); torch.enable_grad(); torch.set_grad_enabled(False);
    torch.set_grad_enabled(True); torch.autocast('cpu', dtype=torch.bfloat16);
    torch.autocast('cpu', enabled=False)
""")
PRODUCTS = forms("""
    {0} @ {1}; torch.matmul({0}, {1}); {0}.matmul({1}); torch.mm({0}, {1});
    torch.addmm({1}[0], {0}, {1}); F.linear({0}, {1}.t()); {0} @ {1} + {1}[0];
    torch.einsum('bi,ij->bj', {0}, {1}); torch.matmul({1}.t(), {0}.t()).t()
""")
JOINS = forms("""
    torch.cat([{0}], {1}); torch.stack([{0}], {1}); torch.stack(({0},), dim={1});
    torch.cat(({0},), dim={1}); torch.concat([{0}], dim={1}); torch.stack([{0}]);
    torch.stack([{0}], {1}).sum({1}); torch.hstack([{0}]); sum([{0}]); torch.vstack(({0},));
    torch.stack([{0}], 1).flatten(1); torch.stack([{0}], 0).mean(0); torch.concatenate([{0}]);
    torch.stack([{0}]).unbind(0)[-1]; torch.cat([{0}], {1}).split(2, {1})[0];
    torch.cat([t.unsqueeze(1) for t in [{0}]], 1); torch.cat([{0}, {0}], {1})
""")
UPDATES = forms("""
    self.{1}.add_({0}.detach().mean()); self.{1} += {0}.detach().sum();
    self.{1} = self.{1} * 0.9 + {0}.detach().mean();
    self.{1}.mul_(0.9).add_({0}.detach().mean(), alpha=0.1)
""")
LAYERS = forms("""
    nn.LayerNorm({}); nn.BatchNorm1d({}); nn.BatchNorm1d({}, affine=False);
    nn.LayerNorm({}, eps=0.01); nn.LayerNorm({}, elementwise_affine=False); nn.Dropout(0.4);
    nn.ReLU(inplace=True); nn.PReLU(); nn.RMSNorm({})
""")
