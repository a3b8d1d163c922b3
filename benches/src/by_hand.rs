//! Mixed precision as one writes it by hand.

use burn::{
    module::{Module, ModuleMapper, Param},
    tensor::{FloatDType, Tensor},
};

/// A model with every float parameter cast to `dtype`; gradients flow back to the parameters of `model`. This is what
/// a program without autocast does at the start of each step, before it casts its input too.
///
/// ```
/// use burn::{nn::LinearConfig, optim::GradientsParams, tensor::{DType, Device, FloatDType, Tensor}};
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(2, 2).init(&device);
/// let x = Tensor::<2>::ones([1, 2], &device).cast(FloatDType::BF16);
/// let y = benches::cast_by_hand(model.clone(), FloatDType::BF16).forward(x);
/// assert_eq!(y.dtype(), DType::BF16);
/// let gradients = GradientsParams::from_grads(y.cast(FloatDType::F32).sum().backward(), &model);
/// assert_eq!(gradients.len(), 2);
/// ```
pub fn cast_by_hand<M: Module>(model: M, dtype: FloatDType) -> M {
    model.map(&mut Cast(dtype))
}

struct Cast(FloatDType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, tensor.cast(self.0), mapper)
    }
}
