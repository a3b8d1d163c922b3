//! A model's parameters in the order in which visitors reach them. This order is the same on all ranks; the
//! parameters' ids are not.

use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    tensor::{Bool, DType, Int, Shape, Tensor},
};
use serde::{Deserialize, Serialize};

use crate::DdpError;

/// The properties of a parameter that must be equal on all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Signature {
    pub(super) path: String,
    pub(super) shape: Shape,
    pub(super) dtype: DType,
    pub(super) trained: bool,
}

impl Signature {
    /// Whether both hold the same kind of data (path, shape and type), whether trained or not.
    fn holds_as_much_as(&self, other: &Self) -> bool {
        (&self.path, &self.shape, self.dtype) == (&other.path, &other.shape, other.dtype)
    }

    fn describe(&self) -> String {
        let Self {
            path,
            shape,
            dtype,
            trained,
        } = self;
        let trained = match trained {
            true => "trained",
            false => "not trained",
        };
        format!("`{path}` (shape {shape:?}, {dtype:?}, {trained})")
    }
}

/// One tensor of a model.
pub(super) struct Parameter {
    pub(super) id: ParamId,
    pub(super) signature: Signature,
}

/// All tensors of a model, buffers included.
pub(super) fn parameters<M: Module>(model: &M) -> Vec<Parameter> {
    let mut visitor = Visitor {
        path: Vec::new(),
        found: Vec::new(),
    };
    model.visit(&mut visitor);
    visitor.found
}

/// The signatures of all tensors of a model.
pub(super) fn signatures<M: Module>(model: &M) -> Vec<Signature> {
    let found = parameters(model).into_iter();
    found.map(|parameter| parameter.signature).collect()
}

/// Describes the first difference between the parameters of rank 0 and this rank's.
pub(super) fn difference(theirs: &[Signature], ours: &[Signature]) -> Option<String> {
    let position = (0..theirs.len().max(ours.len()))
        .find(|position| theirs.get(*position) != ours.get(*position))?;
    let describe = |signature: Option<&Signature>| {
        signature.map_or_else(|| "nothing".into(), Signature::describe)
    };
    Some(format!(
        "parameter {position} is {}, expected {}",
        describe(ours.get(position)),
        describe(theirs.get(position))
    ))
}

/// Checks that a model has the same tensors as another, apart from which are trained.
pub(super) fn check_fits<M: Module>(model: &M, other: &[Signature]) -> Result<(), DdpError> {
    let ours = signatures(model);
    let fits = |(ours, other): (&Signature, &Signature)| ours.holds_as_much_as(other);
    match ours.len() == other.len() && ours.iter().zip(other).all(fits) {
        true => Ok(()),
        false => Err(DdpError::InvalidArgument(format!(
            "this is not the model that the Ddp was made for: {}; make a new Ddp for it",
            difference(other, &ours).unwrap_or_default()
        ))),
    }
}

struct Visitor {
    path: Vec<String>,
    found: Vec<Parameter>,
}

impl Visitor {
    fn add(&mut self, id: ParamId, shape: Shape, dtype: DType, trained: bool) {
        self.found.push(Parameter {
            id,
            signature: Signature {
                path: self.path.join("."),
                shape,
                dtype,
                trained,
            },
        });
    }
}

impl ModuleVisitor for Visitor {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base();
        // A quantized tensor may still be marked as trained, but never has a gradient.
        let quantized = matches!(value.dtype(), DType::QFloat(_));
        let trained = param.is_require_grad() && !quantized;
        self.add(param.id, value.shape(), value.dtype(), trained);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let value = param.base();
        self.add(param.id, value.shape(), value.dtype(), false);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        let value = param.base();
        self.add(param.id, value.shape(), value.dtype(), false);
    }

    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }
}
