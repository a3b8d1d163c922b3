//! [`Op`]: a name for every op of Burn's op traits.

use crate::ops::table::op_table;
use std::sync::LazyLock;

macro_rules! define_ops {
    ($($trait:ident {
        $($name:ident ( $($arg:ident : $kind:tt),* ) -> $ret:ident;)*
    })*) => {
        /// An op of Burn's op traits, named like its method there.
        ///
        /// ```
        /// use burn_layer::Op;
        ///
        /// assert_eq!(Op::float_matmul.name(), "float_matmul");
        /// assert_eq!(Op::conv2d.trait_name(), "ModuleOps");
        /// assert!(Op::float_matmul.takes_float() && !Op::int_add.takes_float());
        /// assert!(Op::float_matmul.gives_float() && !Op::float_argmax.gives_float());
        /// ```
        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u16)]
        pub enum Op {
            $($(
                #[doc = concat!("`", stringify!($trait), "::", stringify!($name), "`")]
                $name,
            )*)*
        }

        impl Op {
            /// Every op, in the order of Burn's traits.
            pub const ALL: &'static [Op] = &[$($(Op::$name,)*)*];

            /// The name of the method in Burn.
            pub const fn name(self) -> &'static str {
                match self { $($(Op::$name => stringify!($name),)*)* }
            }

            /// The op trait that the method belongs to.
            pub const fn trait_name(self) -> &'static str {
                match self { $($(Op::$name => stringify!($trait),)*)* }
            }

            /// Whether the op takes a float tensor, so that a layer may choose the dtype it runs in.
            pub const fn takes_float(self) -> bool {
                match self { $($(Op::$name => false $(|| is_float!($kind))*,)*)* }
            }

            /// Whether the op returns one float tensor, so that a layer may [run](crate::Layer::run) it itself.
            pub const fn gives_float(self) -> bool {
                match self { $($(Op::$name => gives_float!($ret),)*)* }
            }
        }
    };
}

macro_rules! is_float {
    (Float) => {
        true
    };
    (OptFloat) => {
        true
    };
    (Floats) => {
        true
    };
    (Primitive) => {
        true
    };
    ($kind:tt) => {
        false
    };
}

macro_rules! gives_float {
    (Float) => {
        true
    };
    ($kind:tt) => {
        false
    };
}

op_table!(define_ops);

impl Op {
    /// The op's place in [`Op::ALL`], for tables indexed by op.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Whether the op's name says that it is part of backward. (Most of backward consists of ops that occur
    /// in forward as well.)
    ///
    /// ```
    /// use burn_layer::Op;
    ///
    /// assert!(Op::conv2d_weight_backward.is_backward() && !Op::conv2d.is_backward());
    /// ```
    pub fn is_backward(self) -> bool {
        // `has_ctc_loss_backward` is a query, which takes no tensors.
        self.takes_float() && self.name().ends_with("_backward")
    }

    /// The ops whose names say that they are the backward of this one. Empty for ops whose backward consists of ops that occur in
    /// forward as well, such as a matrix product.
    ///
    /// ```
    /// use burn_layer::Op;
    ///
    /// let of_linear = [Op::linear_x_backward, Op::linear_weight_backward, Op::linear_bias_backward];
    /// assert!(Op::linear.backward().eq(of_linear));
    /// assert_eq!(Op::float_matmul.backward().count(), 0);
    /// ```
    pub fn backward(self) -> impl Iterator<Item = Op> {
        let of_this = move |op: &Op| {
            let parts = op.name().strip_prefix(self.name());
            matches!(
                parts,
                Some("_backward" | "_x_backward" | "_weight_backward" | "_bias_backward")
            )
        };
        Op::ALL.iter().copied().filter(of_this)
    }

    /// The op that this one is the [backward](Self::backward) of, if its name says so.
    pub(crate) fn forward(self) -> Option<Op> {
        // Names are compared once: a training step asks this of every convolution.
        static FORWARD: LazyLock<Vec<Option<Op>>> = LazyLock::new(|| {
            let mut forward = vec![None; Op::ALL.len()];
            for op in Op::ALL {
                for backward in op.backward() {
                    forward[backward.index()] = Some(*op);
                }
            }
            forward
        });
        FORWARD[self.index()]
    }

    /// Whether the op has backward ops of its own, or is a matrix product.
    pub(crate) fn has_backward(self) -> bool {
        static HAVE: LazyLock<Vec<bool>> = LazyLock::new(|| {
            let has = |op: &Op| *op == Op::float_matmul || op.backward().next().is_some();
            Op::ALL.iter().map(has).collect()
        });
        HAVE[self.index()]
    }

    /// The op with that name, if there is one.
    ///
    /// ```
    /// use burn_layer::Op;
    ///
    /// assert_eq!(Op::from_name("softmax"), Some(Op::softmax));
    /// assert_eq!(Op::from_name("sofmax"), None);
    /// ```
    pub fn from_name(name: &str) -> Option<Op> {
        Op::ALL.iter().copied().find(|op| op.name() == name)
    }
}

impl core::fmt::Display for Op {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::Op;

    #[test]
    fn a_query_about_backward_is_no_part_of_it() {
        assert!(!Op::has_ctc_loss_backward.is_backward());
        let named = Op::ALL
            .iter()
            .filter(|op| op.name().ends_with("_backward") && **op != Op::has_ctc_loss_backward);
        for op in named {
            assert!(op.is_backward(), "{op}");
        }
        assert!(Op::ctc_loss_backward.is_backward());
    }

    #[test]
    fn forward_is_the_other_way() {
        for op in Op::ALL {
            let of_it = |forward: &Op| forward.backward().any(|backward| backward == *op);
            let forwards: Vec<Op> = Op::ALL.iter().copied().filter(of_it).collect();
            assert_eq!(forwards, Vec::from_iter(op.forward()), "{op}");
        }
    }
}
