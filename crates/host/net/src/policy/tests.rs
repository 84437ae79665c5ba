use super::*;

fn host() -> HostAddresses {
    HostAddresses::of([
        "192.168.7.7".parse().unwrap(),
        "203.0.113.9".parse().unwrap(),
    ])
}

fn policy(mode: Mode, rules: &[&str]) -> Policy {
    let rules = rules.iter().map(|rule| rule.parse().unwrap()).collect();
    Policy::new(mode, rules, Default::default()).unwrap()
}

fn name(text: &str) -> DomainName {
    text.parse().unwrap()
}

fn tcp<'a>(address: &str, port: u16, pins: &'a [DomainName], said: Said<'a>) -> Flow<'a> {
    Flow {
        address: address.parse().unwrap(),
        port,
        protocol: Protocol::Tcp,
        pins,
        said,
    }
}

fn plainly(policy: &Policy, address: &str, port: u16) -> Decision {
    decide(&[], policy, &host(), &tcp(address, port, &[], Said::NotYet))
}

#[test]
fn every_address_has_its_group() {
    for (address, group) in [
        ("8.8.8.8", Group::Public),
        ("198.51.100.7", Group::Public),
        ("10.0.0.5", Group::Private),
        ("172.31.0.1", Group::Private),
        ("172.32.0.1", Group::Public),
        ("100.64.0.1", Group::Private),
        ("169.254.169.254", Group::Metadata),
        ("100.100.100.200", Group::Metadata),
        ("169.254.1.1", Group::Reserved),
        ("127.0.0.1", Group::Host),
        ("0.0.0.0", Group::Host),
        ("192.168.7.7", Group::Host),
        ("203.0.113.9", Group::Host),
        ("255.255.255.255", Group::Reserved),
        ("224.0.0.1", Group::Reserved),
        ("::1", Group::Host),
        ("::", Group::Reserved),
        ("::ffff:127.0.0.1", Group::Host),
        ("::ffff:169.254.169.254", Group::Metadata),
        ("64:ff9b::a00:5", Group::Private),
        ("2002:a00:5::1", Group::Private),
        ("2001:db8::1", Group::Public),
        ("fd00::1", Group::Private),
    ] {
        assert_eq!(
            group_of(address.parse().unwrap(), &host()),
            group,
            "{address}"
        );
    }
}

#[test]
fn the_mode_decides_without_rules() {
    let restricted = [
        "10.0.0.5",
        "169.254.169.254",
        "127.0.0.1",
        "203.0.113.9",
        "224.0.0.1",
    ];
    for address in restricted.into_iter().chain(["198.51.100.7"]) {
        for mode in [Mode::None, Mode::Custom] {
            assert!(matches!(
                plainly(&policy(mode, &[]), address, 80),
                Decision::Deny(_)
            ));
        }
    }
    let public = policy(Mode::Public, &[]);
    assert_eq!(
        plainly(&public, "198.51.100.7", 80),
        Decision::Allow(Reason::Default)
    );
    for address in restricted {
        assert!(
            matches!(
                plainly(&public, address, 80),
                Decision::Deny(Reason::Group(_))
            ),
            "{address}"
        );
    }
    let open = policy(Mode::Open, &[]);
    assert_eq!(
        plainly(&open, "10.0.0.5", 80),
        Decision::Allow(Reason::Default)
    );
    for address in &restricted[1..] {
        assert!(
            matches!(plainly(&open, address, 80), Decision::Deny(_)),
            "{address}"
        );
    }
}

#[test]
fn a_restricted_address_has_to_be_named() {
    let wide = policy(
        Mode::Custom,
        &["allow 0.0.0.0/0", "allow *", "allow 169.254.0.0/16"],
    );
    assert!(matches!(
        plainly(&wide, "198.51.100.7", 80),
        Decision::Allow(_)
    ));
    assert!(matches!(
        plainly(&wide, "169.254.1.1", 80),
        Decision::Allow(Reason::Rule(2))
    ));
    for address in ["10.0.0.5", "169.254.169.254", "127.0.0.1", "203.0.113.9"] {
        assert!(
            matches!(plainly(&wide, address, 80), Decision::Deny(_)),
            "{address}"
        );
    }
    let named = policy(
        Mode::Custom,
        &[
            "allow 10.0.0.0/24:80",
            "allow metadata",
            "allow host:11434",
            "allow 203.0.113.9:22",
        ],
    );
    assert!(matches!(
        plainly(&named, "10.0.0.5", 80),
        Decision::Allow(_)
    ));
    assert!(matches!(plainly(&named, "10.0.0.5", 81), Decision::Deny(_)));
    assert!(matches!(
        plainly(&named, "169.254.169.254", 80),
        Decision::Allow(_)
    ));
    assert!(matches!(
        plainly(&named, "127.0.0.1", 11434),
        Decision::Allow(_)
    ));
    assert!(matches!(
        plainly(&named, "203.0.113.9", 22),
        Decision::Allow(_)
    ));
    assert!(matches!(
        plainly(&named, "203.0.113.9", 23),
        Decision::Deny(_)
    ));
}

#[test]
fn the_first_rule_that_matches_decides() {
    let policy = policy(
        Mode::Public,
        &[
            "deny 198.51.100.0/24:25",
            "allow 198.51.100.0/24",
            "deny public",
        ],
    );
    assert_eq!(
        plainly(&policy, "198.51.100.7", 25),
        Decision::Deny(Reason::Rule(0))
    );
    assert_eq!(
        plainly(&policy, "198.51.100.7", 26),
        Decision::Allow(Reason::Rule(1))
    );
    assert_eq!(
        plainly(&policy, "198.51.101.7", 26),
        Decision::Deny(Reason::Rule(2))
    );
}

#[test]
fn a_name_needs_its_pin_and_the_word_of_the_client() {
    let policy = policy(Mode::Custom, &["allow *.packages.example:443"]);
    let pins = [name("a.packages.example"), name("other.example")];
    let ask = |pins: &[DomainName], said| {
        decide(&[], &policy, &host(), &tcp("198.51.100.7", 443, pins, said))
    };
    assert_eq!(ask(&pins, Said::NotYet), Decision::Undecided);
    assert_eq!(
        ask(&pins, Said::Name(&pins[0])),
        Decision::Allow(Reason::Rule(0))
    );
    assert_eq!(ask(&pins, Said::Nothing), Decision::Allow(Reason::Rule(0)));
    assert_eq!(
        ask(&pins, Said::Hidden),
        Decision::Deny(Reason::NameMismatch)
    );
    assert_eq!(
        ask(&pins, Said::Name(&pins[1])),
        Decision::Deny(Reason::NameMismatch)
    );
    // Allowed by the rule, but the resolver gave another address for it.
    let forged = name("b.packages.example");
    assert_eq!(
        ask(&pins, Said::Name(&forged)),
        Decision::Deny(Reason::NameMismatch)
    );
    assert_eq!(ask(&[], Said::NotYet), Decision::Deny(Reason::Default));
    let inside = tcp("10.0.0.5", 443, &pins, Said::Name(&pins[0]));
    assert!(matches!(
        decide(&[], &policy, &host(), &inside),
        Decision::Deny(Reason::Group(_))
    ));
    let quic = Flow {
        protocol: Protocol::Udp,
        ..tcp("198.51.100.7", 443, &pins, Said::NotYet)
    };
    assert!(matches!(
        decide(&[], &policy, &host(), &quic),
        Decision::Deny(_)
    ));
}

#[test]
fn a_denied_name_is_denied_by_what_the_client_says() {
    let policy = policy(Mode::Public, &["deny evil.example"]);
    let evil = name("evil.example");
    let fine = name("fine.example");
    let ask = |pins: &[DomainName], said| {
        decide(&[], &policy, &host(), &tcp("198.51.100.7", 443, pins, said))
    };
    assert_eq!(ask(&[], Said::NotYet), Decision::Undecided);
    assert_eq!(ask(&[], Said::Name(&evil)), Decision::Deny(Reason::Rule(0)));
    assert_eq!(
        ask(&[], Said::Name(&fine)),
        Decision::Allow(Reason::Default)
    );
    assert_eq!(
        ask(std::slice::from_ref(&evil), Said::Nothing),
        Decision::Deny(Reason::Rule(0))
    );
    assert!(may_resolve(&[], &policy, &evil).is_err());
    assert!(may_resolve(&[], &policy, &fine).is_ok());
}

#[test]
fn only_names_that_a_rule_allows_are_resolved_where_the_default_denies() {
    let policy = policy(
        Mode::Custom,
        &["allow *.packages.example:443", "allow 10.0.0.0/24"],
    );
    assert!(may_resolve(&[], &policy, &name("a.packages.example")).is_ok());
    assert!(may_resolve(&[], &policy, &name("packages.example")).is_err());
    assert!(may_resolve(&[], &policy, &name("secret.attacker.example")).is_err());
    let answer = |address: &str| may_answer(&policy, &host(), address.parse().unwrap());
    assert!(answer("198.51.100.7") && answer("10.0.0.5"));
    assert!(!answer("10.0.1.5") && !answer("127.0.0.1") && !answer("169.254.169.254"));
}

#[test]
fn the_floor_of_the_operator_beats_every_rule() {
    let floor: Vec<forkd_types::Rule> =
        ["deny 203.0.113.0/24", "allow host", "deny *.evil.example"]
            .iter()
            .map(|rule| rule.parse().unwrap())
            .collect();
    let policy = policy(
        Mode::Open,
        &["allow 203.0.113.0/24", "allow b.evil.example"],
    );
    let at = |address: &str| {
        let flow = tcp(address, 443, &[], Said::Nothing);
        decide(&floor, &policy, &host(), &flow)
    };
    assert_eq!(at("203.0.113.9"), Decision::Deny(Reason::Floor(0)));
    assert_eq!(at("198.51.100.7"), Decision::Allow(Reason::Default));
    // An allowance in the floor opens nothing.
    assert!(matches!(at("127.0.0.1"), Decision::Deny(_)));
    assert!(may_resolve(&floor, &policy, &name("b.evil.example")).is_err());
    assert!(may_resolve(&floor, &policy, &name("fine.example")).is_ok());
}
