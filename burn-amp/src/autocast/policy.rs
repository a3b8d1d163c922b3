//! [`Policy`]: which op runs in which precision.

mod record;

use super::{Rule, rules};
use burn::tensor::{DType, FloatDType};
use burn_layer::{Inputs, Op, Plan};
use core::fmt;
pub use record::PolicyError;
use record::PolicyRecord;
use serde::{Deserialize, Serialize};

/// The rule of every op in the [table](rules), without overrides.
const TABLE: [Option<Rule>; Op::ALL.len()] = rules::table();

/// Which op runs in which precision: the low dtype, the table of rules and the overrides.
///
/// The presets have the names that users of PyTorch and Apex know. Printing a policy prints its
/// table.
///
/// ```
/// use burn::tensor::FloatDType;
/// use burn_amp::{Op, Policy, Rule};
///
/// let policy = Policy::builder(FloatDType::BF16)
///     .rule(Op::softmax, Rule::Promote)
///     .build();
/// assert_eq!(policy.rule(Op::softmax), Some(Rule::Promote));
/// assert_eq!(Policy::bf16().rule(Op::softmax), Some(Rule::Full));
/// assert_eq!(Policy::bf16().rule(Op::int_add), None);
/// ```
///
/// # Beside PyTorch's lists
///
/// The rules are those of PyTorch's autocast for CUDA, but for what is not in its lists, or differs:
///
/// | op | PyTorch | here | why |
/// |---|---|---|---|
/// | `float_mean`, `float_mean_dim` | not listed | full, like sums | PyTorch's kernel accumulates in f32 internally; Burn's computes in the dtype that it is given |
/// | `log_sigmoid` | not listed | full | the same: it computes `log` and `exp` in the dtype that it is given |
/// | `sigmoid` | not listed; the loss that takes its logarithms (`binary_cross_entropy`) is an error | full | in 16 bits, a probability may round to 1; its complement then has no logarithm, and the gradient is NaN |
/// | average pools | not listed | full, stored as input | PyTorch's kernels sum in f32 internally |
/// | sums, differences, products, quotients with a scalar | not listed | full, stored as input; in f32 if a scalar that is added would vanish or overflow there | PyTorch's kernels use the scalar in f32 |
/// | fills, paddings, clamps and comparisons with a constant | not listed; `masked_fill` by -1e9 is refused in fp16 | as stored; in f32 if the constant would be rounded to 0 (a clamp to `f32::MIN_POSITIVE`), 1 or -1 (a clamp to `1 - 1e-7` before an arc cosine). A constant beyond the range becomes its end: -1e9 is -65504 in fp16, and `f32::MIN` the lowest finite bf16 | a row that is masked entirely has a softmax without NaN, as in f32. Other constants are rounded: `clamp_max(0.3)` gives at most 0.30078 in bf16. In fp16 all numbers beyond 65504 are one: `lower_elem(-1e8)` does not find what was filled with -1e9, but `equal_elem(-1e9)` does |
/// | `gelu` | not listed | bf16: as stored; fp16: full, stored as input | PyTorch's kernels compute in f32 internally; CubeCL's devices compute it by several ops in the dtype that they are given. In fp16, the cube of 41 overflows, and backward gives NaN. In bf16, `1 + erf(x)` cancels if `x` is far below 0; but with f32, `cargo bench --features cpu,fusion --bench traffic` counted a tenth more bytes for a step of a small vision transformer |
/// | `leaky_relu`, `hypot`, `remainder`, `erf`, `acosh`, `asinh`, `atanh` | not listed | full, stored as input (as the wider one, if there are two) | the same; few models spend much time in them |
/// | `max_dim` | not listed | full | softmax and attention subtract it, which PyTorch's kernels do in f32 |
/// | `grid_sample_2d` | promote | promote; in training, Burn computes it by several ops, which round coordinates to a low grid's dtype | the device sees only these ops |
/// | `softmin` | no such op | full | it is the softmax of the negation |
/// | `ctc_loss` | not listed, and refuses half precision | full | it is a loss |
/// | `batch_norm` | not listed; mixed dtypes inside the kernel | full, stored as input; in training its parts, in f32 | the same result, by casts around a kernel that has one dtype |
/// | `deform_conv2d` | torchvision: full | full | as in torchvision |
/// | `linear` with a bias | low | low, both the product and its sum with the bias, by the rule of the product | Burn computes the layer by these two ops. A vector that a program itself adds to each row of a product looks the same |
/// | softmax in training | full | each of its ops: `x - max(x)` by the rule of `softmax`, stored in f32; `exp`, `log` and the sum full; the quotient of two f32 tensors | Burn's autodiff has no softmax op. The values are the same; where `burn-layer` has kernels (CubeCL's devices that fuse ops), the gradient of the input is stored in the input's dtype, as PyTorch's is |
/// | gradients of tensors that a product or convolution cast down | low, then cast to f32 by the cast's backward | low, stored in f32, or cast where they are read on devices that fuse ops | the values are the same: every tensor that is stored in f32, including parameters, has its gradient in f32 |
/// | `x * x` | promote | full, as the square of `x` | Burn computes `square` and `powi_scalar(2)` by that product |
/// | `prelu`, `elu`, `celu`, `selu`, `mish` in training | `prelu` low, the others not listed | by the rules of the ops that Burn computes them by; their results are f32. (`gelu_approximate` is stored as its input) | the device sees only these ops |
/// | losses, norms and distances that Burn computes by other ops | full | by the rules of these ops | the device sees only these ops: differences of two low tensors are low; exponentials, sums and means are full |
/// | on CubeCL's devices: convolutions with groups or transposed; on wgpu, the CPU and GPUs without tensor cores for the dtype, all | low, added up in f32 | f32, stored as low ones are | CubeCL's kernels for them add up in the dtype of their inputs; see [`Autocast::reduced_precision_reduction`](crate::Autocast::reduced_precision_reduction) |
/// | on CubeCL's devices: the gradient of a max pool with more than two thirds as many windows as elements | low, added up in f32 | f32, stored as low ones are | the same |
/// | `attention` in inference | low, its softmax in f32 inside | low; on CubeCL's devices its softmax too, but for its sums, with a bias, a scale or a soft cap, or where Burn's tuner takes no kernel for flash attention | CubeCL's devices then compute it by several ops in the dtype that they are given. In training its softmax is in f32 |
/// | `dot` | promote | a low product, summed in full | the same |
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "PolicyRecord", try_from = "PolicyRecord")]
pub struct Policy {
    name: String,
    enabled: bool,
    low: FloatDType,
    low_outputs: bool,
    rules: [Option<Rule>; Op::ALL.len()],
}

impl Policy {
    /// Matrix products and convolutions in bf16; sums, norms and losses in f32: PyTorch's autocast.
    /// bf16 has the range of f32, so no loss scaling is needed.
    pub fn bf16() -> Self {
        Self::builder(FloatDType::BF16).name("bf16").build()
    }

    /// Like [`bf16`](Self::bf16), but in fp16, which needs a [`LossScaler`](crate::LossScaler).
    pub fn fp16() -> Self {
        Self::builder(FloatDType::F16).name("fp16").build()
    }

    /// Everything in f32, as without autocast: Apex's `O0`.
    pub fn o0() -> Self {
        let mut policy = Self::builder(FloatDType::F32).name("O0").build();
        policy.enabled = false;
        policy
    }

    /// Apex's `O1`: fp16, with a rule for each op. The rules are those of [`fp16`](Self::fp16). Apex's preset includes dynamic
    /// loss scaling, with a scale of at most 2^24; here, add a [`LossScaler`](crate::LossScaler).
    pub fn o1() -> Self {
        Self::builder(FloatDType::F16).name("O1").build()
    }

    /// Apex's `O2`: activations are kept in fp16 everywhere. Softmax and norms still compute in
    /// f32, but their results are stored low, which halves the memory of activations. Powers, exponentials, logarithms,
    /// probabilities (`sigmoid`) and maxima along a dimension stay in f32. (In training, Burn computes softmax and norms by several
    /// ops. Sums and differences of a low tensor and one in f32 stay in f32.) As with [`o1`](Self::o1), loss scaling is up to a
    /// [`LossScaler`](crate::LossScaler).
    pub fn o2() -> Self {
        let builder = Self::builder(FloatDType::F16).name("O2");
        builder.low_outputs(true).build()
    }

    /// Apex's `O3`: every op stores its result in the dtype of its input, which is fp16 after the first product. Ops that PyTorch's
    /// kernels for fp16 compute in f32 inside are computed so here too, and what Burn computes by several ops (a norm or
    /// a softmax in training) keeps its sums, powers, exponentials, logarithms and maxima in f32. So do `sigmoid`, parameters, their gradients and
    /// what the optimizer computes from them. Rarely accurate enough for training.
    pub fn o3() -> Self {
        let mut builder = Self::builder(FloatDType::F16).name("O3").low_outputs(true);
        for op in Op::ALL.iter().copied() {
            if TABLE[op.index()] == Some(Rule::Full) && !rules::STAY_FULL.contains(&op) {
                builder = builder.rule(op, Rule::FullKeep);
            }
        }
        builder.build()
    }

    /// A builder for your own policy. It begins with the rules of `bf16`, or with those of `fp16` if `low` is fp16.
    pub fn builder(low: FloatDType) -> PolicyBuilder {
        let mut rules = TABLE;
        if low == FloatDType::F16 {
            for op in rules::OVERFLOWS_IN_FP16 {
                rules[op.index()] = Some(Rule::FullKeep);
            }
        }
        PolicyBuilder {
            policy: Policy {
                name: String::from("custom"),
                enabled: true,
                low,
                low_outputs: false,
                rules,
            },
        }
    }

    /// The preset with that name: `bf16`, `fp16`, `O0`, `O1`, `O2` or `O3`.
    ///
    /// ```
    /// use burn_amp::Policy;
    ///
    /// assert_eq!(Policy::from_name("O2"), Some(Policy::o2()));
    /// assert_eq!(Policy::from_name("O4"), None);
    /// ```
    pub fn from_name(name: &str) -> Option<Self> {
        let presets = [
            Self::bf16,
            Self::fp16,
            Self::o0,
            Self::o1,
            Self::o2,
            Self::o3,
        ];
        let mut presets = presets.into_iter().map(|preset| preset());
        presets.find(|preset| preset.name == name)
    }

    /// The name of the preset; `custom` for your own policy, unless you [name](PolicyBuilder::name) it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The low dtype.
    pub fn low_dtype(&self) -> FloatDType {
        self.low
    }

    /// Whether the results of f32 ops are stored in the low dtype.
    pub fn low_outputs(&self) -> bool {
        self.low_outputs
    }

    /// The rule of `op`; `None` for an op that takes no float tensor.
    pub fn rule(&self, op: Op) -> Option<Rule> {
        self.rules[op.index()]
    }

    /// Whether the policy changes anything.
    pub(super) fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// The plan for one run of `op`.
    pub(super) fn plan(&self, op: Op, inputs: &Inputs) -> Plan {
        let op = match op {
            // Burn computes a square as a product. It is a power nevertheless, which fp16 cannot hold for
            // inputs from 256 on.
            Op::float_mul if inputs.same => Op::float_powi_scalar,
            // In training, Burn computes a softmax by several ops. The first is a difference, of which bf16 holds no more
            // than three digits.
            Op::float_sub if inputs.shifted => Op::softmax,
            // Burn's client computes the gradient of a transposed convolution's input as a convolution.
            Op::conv1d if inputs.gradient_of.is_some() => Op::conv_transpose1d_x_backward,
            Op::conv2d if inputs.gradient_of.is_some() => Op::conv_transpose2d_x_backward,
            Op::conv3d if inputs.gradient_of.is_some() => Op::conv_transpose3d_x_backward,
            // Burn computes a linear layer as a product and a sum. (The product of a region in f32 stays as it is.)
            Op::float_add if inputs.biased && inputs.first == DType::from(self.low) => {
                Op::float_matmul
            }
            op => op,
        };
        if !self.enabled || inputs.nominal == DType::F64 || inputs.widest == DType::F64 {
            return inputs.promote();
        }
        let low = DType::from(self.low);
        let rule = match op {
            // Zeros and ones, such as the mask that dropout keeps, are just as exact in the low dtype.
            Op::float_random => return Plan::default().store(low),
            op => self.rule(op),
        };
        let Some(rule) = rule else {
            return inputs.promote();
        };
        // The gradient of a vector, such as a bias. If there was one row, no sum has brought it to f32.
        if op == Op::float_reshape && inputs.to_vector && inputs.first_is_gradient {
            return Plan::compute(DType::F32);
        }
        // The gradient of a weight that was used in a plain product: x^T dy.
        let of_weight = op == Op::float_matmul && inputs.first_transposed;
        let rule = if of_weight { rule.of_weight() } else { rule };
        match rule {
            Rule::WeightGrad if of_weight && inputs.of_shared => {
                Plan::compute(low).store(DType::F32).over_batch()
            }
            // The gradient of a tensor that was cast for a product. As in PyTorch, it has the dtype before the cast.
            Rule::Lower if inputs.gradient_of == Some(DType::F32) => {
                Plan::compute(low).store(DType::F32)
            }
            // With gradient checkpointing, nothing is known of the tensors that are computed again. The factor may be a parameter.
            Rule::Lower if is_of_unknown(op, inputs) => Plan::compute(low).store(DType::F32),
            Rule::Lower => Plan::compute(low),
            Rule::WeightGrad => Plan::compute(low).store(DType::F32),
            Rule::Full
                if self.low_outputs
                    && inputs.stored_low()
                    && !inputs.shifted
                    && !rules::STAY_FULL.contains(&op) =>
            {
                Plan::compute(DType::F32).store(low)
            }
            Rule::Full | Rule::Accumulate => Plan::compute(DType::F32),
            Rule::FullKeep if inputs.shifted => Plan::compute(DType::F32),
            Rule::FullKeep if rules::OF_TWO.contains(&op) => {
                Plan::compute(DType::F32).store(inputs.widest)
            }
            Rule::FullKeep => Plan::compute(DType::F32).store(inputs.first),
            // Dropout and silu, which Burn computes as products. As in PyTorch, low inputs stay low, and so do their gradients.
            Rule::Promote if op == Op::float_mul && inputs.masked == Some(low) => {
                Plan::compute(low)
            }
            Rule::Promote if op == Op::float_mul && inputs.gated == Some(low) => {
                Plan::compute(DType::F32).store(low)
            }
            Rule::Promote if op == Op::float_add && inputs.of_gated == Some(low) => {
                Plan::compute(DType::F32).store(low)
            }
            Rule::Promote => inputs.promote(),
        }
    }
}

/// Whether the op is a product `dy w^T` of backward, of which it is not known what it is the gradient of.
fn is_of_unknown(op: Op, inputs: &Inputs) -> bool {
    op == Op::float_matmul
        && inputs.first_is_gradient
        && inputs.last_transposed
        && !inputs.last_is_gradient
        && inputs.gradient_of.is_none()
}

impl Default for Policy {
    /// [`o0`](Policy::o0), which changes nothing.
    fn default() -> Self {
        Self::o0()
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let outputs = if self.low_outputs {
            "low"
        } else {
            "as computed"
        };
        writeln!(
            f,
            "policy {} (low dtype {:?}, f32 results stored {outputs})",
            self.name, self.low
        )?;
        for op in Op::ALL {
            if let Some(rule) = self.rule(*op) {
                writeln!(f, "  {op:<36} {rule}")?;
            }
        }
        Ok(())
    }
}

/// Builds a [`Policy`].
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it builds"]
pub struct PolicyBuilder {
    policy: Policy,
}

impl PolicyBuilder {
    /// The name that reports print.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.policy.name = name.into();
        self
    }

    /// Runs `op` under `rule`, and with it the [ops that are its backward](Op::backward): gradients of weights are
    /// computed as the rule says and stored in f32. To give backward ops another rule, set it afterwards.
    ///
    /// A rule applies to ops as they reach the device. A linear layer reaches it as a product and the sum of that with the bias;
    /// the rule of [`Op::float_matmul`] applies to both. In training, Burn computes more things by several ops. A softmax is a
    /// difference, to which the rule of [`Op::softmax`] applies, and an exponential, a sum and a quotient, each with its own
    /// rule. Norms are sums, differences and quotients; attention is products and a softmax. Dropout, `silu` and gates are
    /// elementwise products with zeros and ones or with a sigmoid: under [`Rule::Promote`], the rule of [`Op::float_mul`], these
    /// keep low inputs low. Other activations than `relu`, `gelu`, `sigmoid` and `log_sigmoid` reach the device as their parts,
    /// and a rule for `Op::prelu` changes nothing then.
    ///
    /// ```
    /// use burn::tensor::FloatDType;
    /// use burn_amp::{Op, Policy, Rule};
    ///
    /// let policy = Policy::builder(FloatDType::BF16).rule(Op::conv2d, Rule::Full).build();
    /// assert_eq!(policy.rule(Op::conv2d_x_backward), Some(Rule::Full));
    /// assert_eq!(policy.rule(Op::conv2d_weight_backward), Some(Rule::Accumulate));
    /// ```
    ///
    /// # Panics
    ///
    /// When `op` takes no float tensor, so that no rule can apply to it.
    pub fn rule(mut self, op: Op, rule: Rule) -> Self {
        assert!(
            op.takes_float(),
            "{op} takes no float tensor: no precision rule applies to it"
        );
        self.policy.rules[op.index()] = Some(rule);
        for backward in op.backward() {
            self.policy.rules[backward.index()] = Some(rule.of_backward(backward));
        }
        self
    }

    /// Stores the results of f32 ops (softmax, norms, losses; not sums, powers, exponentials, logarithms, `sigmoid` and maxima) in the low dtype, if
    /// their first input is low. This halves the memory of activations, except those of a softmax or norm in training, which Burn
    /// computes by several ops: see [`Policy::o2`].
    pub fn low_outputs(mut self, low: bool) -> Self {
        self.policy.low_outputs = low;
        self
    }

    /// The policy.
    pub fn build(self) -> Policy {
        self.policy
    }
}
