//! The exponential moving average of a model's weights.

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    store::{ModuleRecord, RecordError},
    tensor::{DType, FloatDType, Tensor},
};

/// The exponential moving average of a model's weights, which often generalizes better than the weights
/// themselves (Polyak and Juditsky 1992; timm's `ModelEmaV2`, PyTorch's `get_ema_multi_avg_fn`).
///
/// After each step, `average = decay * average + (1 - decay) * weights`, for all float tensors including running statistics,
/// as in timm; quantized tensors and those that are not floats are copied. Averages of 16-bit weights are kept in `f32`,
/// which does not lose small changes. Ranks with equal weights have equal averages, without communication.
///
/// ```
/// use burn::{nn::LinearConfig, tensor::Device};
/// use burn_ddp::ModelEma;
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(4, 2).init(&device);
/// let mut ema = ModelEma::new(&model, 0.999).warm_up(true);
/// for _ in 0..3 {
///     // optimizer.step(..)
///     ema.update(&model);
/// }
/// let averaged = ema.apply(&model); // for evaluation; `model` is as it was
/// # let _ = averaged;
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct ModelEma<M> {
    average: M,
    decay: f64,
    warm_up: bool,
    updates: u64,
}

impl<M: Module> ModelEma<M> {
    /// Starts with the weights of `model`.
    ///
    /// # Panics
    ///
    /// Panics if `decay` is not between 0 and 1.
    pub fn new(model: &M, decay: f64) -> Self {
        assert!(
            (0.0..=1.0).contains(&decay),
            "the decay, {decay}, must be between 0 and 1"
        );
        struct Widen;

        impl ModuleMapper for Widen {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                param.map(widen)
            }
        }

        Self {
            average: model.valid().map(&mut Widen),
            decay,
            warm_up: false,
            updates: 0,
        }
    }

    /// Whether the decay starts small, so that the average soon forgets the first weights: update `t` (from 0)
    /// uses at most `(1 + t) / (10 + t)`, as TensorFlow's `ExponentialMovingAverage` does. Default: no.
    pub fn warm_up(mut self, warm_up: bool) -> Self {
        self.warm_up = warm_up;
        self
    }

    /// Updates the averages with the model's weights. Call it after each step.
    ///
    /// # Panics
    ///
    /// If the model has more float tensors than when the average was made.
    pub fn update(&mut self, model: &M) {
        let updates = self.updates as f64;
        let decay = match self.warm_up {
            true => self.decay.min((1.0 + updates) / (10.0 + updates)),
            false => self.decay,
        };
        self.average = self.blend(model, decay);
        self.updates += 1;
    }

    /// The number of updates so far.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// The model with the averages in place of its weights, in the weights' dtypes, ready for evaluation.
    ///
    /// `model` itself is unchanged, so training simply goes on with it. (Other libraries need a call of `restore` first.)
    ///
    /// # Panics
    ///
    /// As [`update`](Self::update).
    pub fn apply(&self, model: &M) -> M {
        struct Apply(Averages);

        impl ModuleMapper for Apply {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                let average = self.0.next::<D>();
                param.map(|value| match value.dtype() {
                    DType::QFloat(_) => value,
                    dtype => average.cast(dtype),
                })
            }
        }

        model.valid().map(&mut Apply(Averages::of(&self.average)))
    }

    /// The averages, for a checkpoint. Save [`updates`](Self::updates) with them.
    pub fn record(&self) -> ModuleRecord {
        self.average.clone().into_record()
    }

    /// Continues with the averages and the number of updates of a checkpoint.
    ///
    /// # Errors
    ///
    /// [`RecordError`] when the record belongs to another model.
    pub fn restore(mut self, record: ModuleRecord, updates: u64) -> Result<Self, RecordError> {
        self.average = self.average.try_load_record(record)?;
        self.updates = updates;
        Ok(self)
    }

    /// The model, for evaluation, with `decay * average + (1 - decay) * weights` as its weights.
    fn blend(&self, model: &M, decay: f64) -> M {
        struct Blend {
            averages: Averages,
            decay: f64,
        }

        impl ModuleMapper for Blend {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                let average = widen(self.averages.next::<D>());
                param.map(|value| match (value.dtype(), self.decay) {
                    (DType::QFloat(_), _) => value,
                    // An infinite value times a factor of 0 would be NaN.
                    (_, 0.0) => widen(value),
                    (_, 1.0) => average,
                    (_, decay) => average.mul_scalar(decay) + widen(value).mul_scalar(1.0 - decay),
                })
            }
        }

        let averages = Averages::of(&self.average);
        model.valid().map(&mut Blend { averages, decay })
    }
}

/// A model's float tensors, keyed by their position in the order of visits. Loading a record changes the ids of
/// parameters, but not this order.
struct Averages {
    tensors: GradientsParams,
    next: u64,
}

impl Averages {
    fn of<M: Module>(model: &M) -> Self {
        struct Collect(Averages);

        impl ModuleVisitor for Collect {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let place = ParamId::from(self.0.next);
                self.0.tensors.register(place, param.base());
                self.0.next += 1;
            }
        }

        let mut collect = Collect(Self {
            tensors: GradientsParams::new(),
            next: 0,
        });
        model.visit(&mut collect);
        Self {
            next: 0,
            ..collect.0
        }
    }

    fn next<const D: usize>(&mut self) -> Tensor<D> {
        let place = ParamId::from(self.next);
        self.next += 1;
        let tensor = self.tensors.remove::<D>(place);
        tensor.expect(
            "a model has the float tensors that it had when its average was made; make a new `ModelEma` for one with more (such as \
             an fp8 layer that ran with delayed scaling for the first time)",
        )
    }
}

/// Casts `f16` and `bf16` to `f32`.
fn widen<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    match tensor.dtype() {
        DType::F16 | DType::BF16 => tensor.cast(FloatDType::F32),
        _ => tensor,
    }
}
