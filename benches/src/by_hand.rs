//! Mixed precision with casts that the program writes by hand.

use burn::{
    module::{Module, ModuleMapper, Param},
    tensor::{FloatDType, Tensor},
};

/// Casts every float parameter of a model to `dtype`. Gradients flow back to the parameters of `model`. A program without
/// autocast can do so at the start of each step, and cast its input too.
///
/// ```
/// use burn::{nn::LinearConfig, optim::GradientsParams, tensor::{DType, Device, FloatDType, Tensor}};
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(2, 2).init(&device);
/// let x = Tensor::<2>::ones([1, 2], &device).cast(FloatDType::BF16);
/// let y = benches::cast_all(model.clone(), FloatDType::BF16).forward(x);
/// assert_eq!(y.dtype(), DType::BF16);
/// let gradients = GradientsParams::from_grads(y.cast(FloatDType::F32).sum().backward(), &model);
/// assert_eq!(gradients.len(), 2);
/// ```
pub fn cast_all<M: Module>(model: M, dtype: FloatDType) -> M {
    model.map(&mut Cast {
        dtype,
        products_alone: false,
        within: Vec::new(),
    })
}

/// Casts only the parameters of products to `dtype`, like autocast: those of linear layers and convolutions.
///
/// ```
/// use burn::{nn::{BatchNormConfig, LinearConfig}, tensor::{DType, Device, FloatDType}};
///
/// let device = Device::flex();
/// let model = (LinearConfig::new(2, 2).init(&device), BatchNormConfig::new(2).init(&device));
/// let (linear, norm) = benches::cast_products(model, FloatDType::BF16);
/// assert_eq!((linear.weight.dtype(), norm.gamma.dtype()), (DType::BF16, DType::F32));
/// ```
pub fn cast_products<M: Module>(model: M, dtype: FloatDType) -> M {
    model.map(&mut Cast {
        dtype,
        products_alone: true,
        within: Vec::new(),
    })
}

struct Cast {
    dtype: FloatDType,
    products_alone: bool,
    /// The modules that contain the current parameter, outermost first.
    within: Vec<String>,
}

impl ModuleMapper for Cast {
    fn enter_module(&mut self, _name: &str, container: &str) {
        self.within.push(container.into());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.within.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let layer = self.within.last().map(String::as_str);
        let product = matches!(layer, Some("Struct:Linear" | "Struct:Conv2d"));
        if self.products_alone && !product {
            return param;
        }
        let (id, tensor, mapper) = param.consume();
        Param::from_mapped_value(id, tensor.cast(self.dtype), mapper)
    }
}
